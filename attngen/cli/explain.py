"""`explain`: a kernel's plan with its reasons, registers, work, and visited tiles."""

from __future__ import annotations

import json

import click

from attngen.cli import options
from attngen.cli.specs import Gradients, arch_named, known_params, load_specs, own_problem, pointing_at, source_of


@click.command("explain")
@options.spec
@options.kernel
@options.arch
@options.size("--q-len", 1, "Number of queries.", 2048)
@options.kv_len
@options.param
@options.gradients
@click.option("--json", "as_json", is_flag=True, help="Print the same as data; docs/json.md lists the keys.")
def command(
    spec: str, kernel: str | None, arch: str | None, q_len: int, kv_len: int | None, given: tuple[str, ...],
    gradients: Gradients, as_json: bool,
) -> None:  # fmt: skip
    """Explain a kernel: decisions with reasons, shared memory, registers, occupancy, work, roofline, and visited tiles.

    \b
    attngen explain gpt2
    attngen explain mistral_window --q-len 8192 --param size=1024   for a value of a param
    attngen explain gpt2 --kernel naive --arch sm_90a
    attngen explain unequal_heads --q-len 1 --kv-len 8192    a step that decodes: its splits and their join
    attngen explain alibi --backward                the derived equations, and the plan that computes them

    Registers and spills come from NVRTC, which needs no GPU. The roofline uses the data sheet of one GPU of the architecture.
    Operations and bytes are of one batch, and of one head unless the spec states `heads`. Each product of a backward counts
    once, five for q, k and v; the table of launches counts repeated products too.
    """
    from attngen.inspect.call import Call
    from attngen.inspect.explain import explain_gradients, explain_plan, explain_tiles
    from attngen.inspect.explain_work import explain_changes, explain_work
    from attngen.inspect.occupancy import explain_occupancy
    from attngen.inspect.prepare import check_call
    from attngen.inspect.work import check_countable
    from attngen.reference.problems import Shape

    lengths = (q_len, q_len if kv_len is None else kv_len)
    loaded = load_specs(spec)
    target = arch_named(arch, kernel, loaded)
    explained = []
    for one in loaded:
        with pointing_at(one):
            problem = own_problem(one.spec, target, kernel, *lengths, gradients)
        plan, source = source_of(one, target, kernel, gradients, problem=problem)
        params = known_params(one.spec, given)
        check_call(one.spec, Shape(1, q_len=lengths[0], kv_len=lengths[1]), params)
        call = Call(one.spec, plan, *lengths, params)
        check_countable(plan, call.problem)
        if as_json:
            from attngen.inspect.data import explain_data

            explained.append(explain_data(call, source))
            continue
        texts = [  # all of them before the first is printed, so that a refusal is the only output
            explain_gradients(one.spec, plan) if plan.wanted else "",
            explain_plan(one.spec, plan),
            explain_occupancy(source, target),
            explain_work(call),
            "" if plan.wanted else explain_tiles(call),
            explain_changes(call),
        ]
        for text in filter(None, texts):
            click.echo(text)
    if as_json:
        click.echo(json.dumps({"attentions": explained}, indent=2))
