"""Replicas of a model behind one front: which one answers, and what happens when one is lost."""
