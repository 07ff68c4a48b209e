"""Plans: who sends which elements to whom so that one layout becomes another."""

from converters.plan.sender_choice import Cutting
from converters.plan.transfers import Plan, Transfer, plan

__all__ = ["Cutting", "Plan", "Transfer", "plan"]
