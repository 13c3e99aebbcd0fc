"""The training loop around GRPO: warm start, rollout, update, validation, checkpoints."""
