"""The configuration as typed values: every key, its default and its meaning."""

from megarl.schema.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    PreferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from megarl.schema.config import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    LoopConfig,
    MegarlConfig,
    ModelConfig,
    PoolConfig,
    RefitConfig,
    RewardConfig,
    RewardTermConfig,
    RolloutConfig,
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
    "LoopConfig",
    "MegarlConfig",
    "ModelConfig",
    "PoolConfig",
    "PreferenceConfig",
    "RefitConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RewardTermConfig",
    "RolloutConfig",
    "SftConfig",
    "TeacherConfig",
    "TrackingConfig",
]
