"""The only package that patches or works around ai2-olmo. Importing it needs torch and takes OLMo's ten seconds."""

# ruff: noqa: E402
import warnings

# OLMo registers OmegaConf resolvers under a deprecated name with every config it makes.
warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated", category=UserWarning)

from olmo_ext.upstream.compile import CompileReport, compile_blocks
from olmo_ext.upstream.shaped_model import (
    ShapedModelConfig,
    build_from_model_config,
    build_model,
    shaped_model_config,
)
from olmo_ext.upstream.version import check_upstream

__all__ = [
    "CompileReport",
    "ShapedModelConfig",
    "build_from_model_config",
    "build_model",
    "check_upstream",
    "compile_blocks",
    "shaped_model_config",
]
