"""The Hugging Face side: model code that needs no other file of ours, copied into every exported folder."""

from __future__ import annotations


def register() -> None:
    """Make `AutoModelForCausalLM` and `AutoConfig` know `olmo_ext` without `trust_remote_code`, in this process."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from olmo_ext.hf.configuration_olmo_ext import OlmoExtConfig
    from olmo_ext.hf.modeling_olmo_ext import OlmoExtForCausalLM, OlmoExtModel

    AutoConfig.register(OlmoExtConfig.model_type, OlmoExtConfig, exist_ok=True)
    AutoModel.register(OlmoExtConfig, OlmoExtModel, exist_ok=True)
    AutoModelForCausalLM.register(OlmoExtConfig, OlmoExtForCausalLM, exist_ok=True)
