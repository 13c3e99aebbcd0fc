"""Engines that sample tokens behind ``LLMClient``: ``local``, on the trainer's own weights."""
