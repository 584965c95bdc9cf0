"""Replay of a serving trace through a small scheduler: the demonstration and the soak test."""
