"""Prompts, conversations, pairs and trajectories."""

from megarl.data.conversations import Conversation, load_conversations
from megarl.data.pairs import PreferencePair, load_pairs
from megarl.data.prompts import Prompt, PromptSet, load_prompts
from megarl.data.sampler import PromptSampler, SamplerState
from megarl.data.trajectory import FinishReason, PromptGroup, Trajectory, Turn, prompt_of_each, trajectories_of

__all__ = [
    "Conversation",
    "FinishReason",
    "PreferencePair",
    "Prompt",
    "PromptGroup",
    "PromptSampler",
    "PromptSet",
    "SamplerState",
    "Trajectory",
    "Turn",
    "load_conversations",
    "load_pairs",
    "load_prompts",
    "prompt_of_each",
    "trajectories_of",
]
