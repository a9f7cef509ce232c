"""Training: a small base model from scratch, and the multi-token-prediction head of any model."""
