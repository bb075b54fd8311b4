"""Prompts to measure and to train on."""
