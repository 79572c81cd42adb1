"""The configuration: one tree of dataclasses, the only home of every default.

Settings arrive in this order, later ones winning: the dataclasses, a YAML file, `key=value` words.
A field's metadata holds its choices or bounds, which constructors check, and the settings that it needs
(`only_with`), which command lines check; the string below a field is its help text. This room imports no
other room of the package, but the tables that a setting names.
"""

from dlm_rag.config.inference import DecodeConfig, EngineConfig, ModelConfig, RetrievalConfig, ServingConfig
from dlm_rag.config.training import DataConfig, PlanConfig, SynthesisConfig, TrainConfig
from dlm_rag.config.tree import (
    CONFIG_FOLDER,
    Config,
    dump_config,
    find_config_file,
    is_existing_file,
    list_changed_settings,
    list_setting_fields,
    list_setting_help,
    load_config,
)

__all__ = [
    "CONFIG_FOLDER",
    "Config",
    "DataConfig",
    "DecodeConfig",
    "EngineConfig",
    "ModelConfig",
    "PlanConfig",
    "RetrievalConfig",
    "ServingConfig",
    "SynthesisConfig",
    "TrainConfig",
    "dump_config",
    "find_config_file",
    "is_existing_file",
    "list_changed_settings",
    "list_setting_fields",
    "list_setting_help",
    "load_config",
]
