"""The configuration as dataclasses: every key with its type, default and meaning."""

from megarl.schema.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    ImplicitRewardModelConfig,
    PreferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from megarl.schema.cluster import ClusterConfig, PoolConfig
from megarl.schema.config import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    LoraConfig,
    MegarlConfig,
    ModelConfig,
    RefitConfig,
    RewardConfig,
    RewardTermConfig,
    RolloutConfig,
    ScheduleConfig,
    SftConfig,
    TrackingConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "ImplicitRewardModelConfig",
    "LoopConfig",
    "LoraConfig",
    "MegarlConfig",
    "ModelConfig",
    "PoolConfig",
    "PreferenceConfig",
    "RefitConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RewardTermConfig",
    "RolloutConfig",
    "ScheduleConfig",
    "SftConfig",
    "TeacherConfig",
    "TrackingConfig",
]
