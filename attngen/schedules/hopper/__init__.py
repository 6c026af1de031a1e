"""The schedule `hopper`: an object for heads of up to 256, for wider heads, for products of 8 bits, and for fp32."""

from attngen.plan.plan import LARGEST_HEAD, WIDEST_HEAD, Schedule
from attngen.plan.prepared import converted_types
from attngen.schedules.hopper import fp8_plan, fp8_shown, fp32_plan, needs, plan, shown, wide_plan, wide_shown
from attngen.schedules.hopper.context import Hopper
from attngen.schedules.hopper.fp8_context import HopperFp8
from attngen.schedules.hopper.fp32_context import HopperFp32
from attngen.schedules.hopper.wide_context import HopperWide
from attngen.schedules.parts import wgmma

HOPPER = Schedule(
    name="hopper",
    keyword="hopper",
    summary="A persistent kernel with warp specialization: a producer copies by TMA, two to four consumers multiply by wgmma.",
    propose=plan.propose,
    why_not=wgmma.why_not_beside_terms,
    types=converted_types,
    converts_keys=True,
    scales_heads=True,
    needs=wgmma.NEEDED,
    tiles=plan.tiles,
    by_lengths=plan.by_lengths,
    propose_tile=plan.with_tile,
    holds_q=lambda facts, arch, tile: needs.may_hold_q(facts, tile),
    on_tensor_cores=True,
    by_tma=True,
    is_warp_specialized=True,
    emulated_ns=7,
    context=Hopper,
    loops=shown.loops,
)

HOPPER_WIDE = Schedule(
    name="hopper_wide",
    keyword="hopper",
    summary="hopper for heads of more than 256: two consumers have the same rows, and half of the columns of O each.",
    propose=wide_plan.propose,
    why_not=wgmma.why_not_beside_terms,
    types=converted_types,
    converts_keys=True,
    scales_heads=True,
    needs=wgmma.NEEDED,
    heads_above=LARGEST_HEAD,
    largest_head=WIDEST_HEAD,
    tiles=wide_plan.tiles,
    in_return="two warpgroups have half of the columns of O each",
    on_tensor_cores=True,
    by_tma=True,
    is_warp_specialized=True,
    emulated_ns=7,
    context=HopperWide,
    loops=wide_shown.loops,
)

HOPPER_FP8 = Schedule(
    name="hopper_fp8",
    keyword="hopper",
    summary="hopper for Q, K and V of 8 bits: products of 8 bits, whose sums over keys are added in fp32 after each tile.",
    propose=fp8_plan.propose,
    why_not=fp8_plan.why_not,
    types=fp8_plan.types,
    needs=wgmma.NEEDED,
    tiles=fp8_plan.tiles,
    in_return="products are of 8 bits",
    multiplies_bytes=True,
    scales_heads=True,
    on_tensor_cores=True,
    by_tma=True,
    is_warp_specialized=True,
    emulated_ns=7,
    context=HopperFp8,
    loops=fp8_shown.loops,
)

HOPPER_FP32 = Schedule(
    name="hopper_fp32",
    keyword="hopper",
    summary="hopper for fp32: six products of three terms of bf16 a number, whose sums over keys are added after each tile.",
    propose=fp32_plan.propose,
    why_not=fp32_plan.why_not,
    types=fp32_plan.types,
    needs=wgmma.NEEDED,
    largest_head=fp32_plan.WIDEST,
    tiles=fp32_plan.tiles,
    in_return="each number is three of bf16",
    multiplies_terms=True,
    scales_heads=True,
    on_tensor_cores=True,
    by_tma=True,
    is_warp_specialized=True,
    emulated_ns=40,
    context=HopperFp32,
    loops=shown.loops,
)
