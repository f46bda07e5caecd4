"""The pipeline: stages, the commands beside them, and what they are made of."""
