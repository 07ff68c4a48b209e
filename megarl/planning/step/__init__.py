"""Predicts the seconds of a step, stage by stage, from the rates of the devices."""
