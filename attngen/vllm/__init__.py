"""attngen as an attention backend of vLLM, by the entry point `vllm.general_plugins`.

    pip install attngen
    vllm serve MODEL --attention-backend CUSTOM

vLLM calls `register` in each of its processes. CUSTOM is the place that vLLM keeps for a backend from outside.
"""

from __future__ import annotations

import warnings

from attngen.optional import required

BACKEND = "attngen.vllm.backend.AttngenBackend"


def register() -> None:
    """Puts attngen into vLLM's place CUSTOM; another plugin's backend stays there, with a warning."""
    with required("vllm", "attngen.vllm", "vllm"):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        warnings.warn(
            f"vLLM's backend CUSTOM is {custom.get_path()}, not attngen; the environment variable VLLM_PLUGINS chooses plugins",
            stacklevel=2,
        )
        return
    register_backend(custom, BACKEND)
