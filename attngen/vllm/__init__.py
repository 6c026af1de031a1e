"""attngen as an attention backend of vLLM, by the entry point `vllm.general_plugins`.

    pip install attngen
    vllm serve MODEL --attention-backend CUSTOM

vLLM calls `register` in each of its processes. CUSTOM is the place that vLLM keeps for a backend from outside. A model with
latent attention takes another class there, which the environment variable of plugins chooses:

    VLLM_PLUGINS=attngen_latent vllm serve MODEL --attention-backend CUSTOM
"""

from __future__ import annotations

import os
import warnings

from attngen.optional import required

BACKEND = "attngen.vllm.backend.AttngenBackend"
LATENT = "attngen.vllm.latent.AttngenLatentBackend"


def register() -> None:
    """Puts attngen into vLLM's place CUSTOM; another plugin's backend stays there, with a warning."""
    _register(BACKEND)


def register_latent() -> None:
    """The same for latent attention, if VLLM_PLUGINS names `attngen_latent`: without this variable vLLM loads all plugins."""
    if "attngen_latent" in os.environ.get("VLLM_PLUGINS", "").split(","):
        _register(LATENT)


def _register(backend: str) -> None:
    with required("vllm", "attngen.vllm", "vllm"):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != backend:
        warnings.warn(
            f"vLLM's backend CUSTOM is {custom.get_path()}, not attngen; the environment variable VLLM_PLUGINS chooses plugins",
            stacklevel=2,
        )
        return
    register_backend(custom, backend)
