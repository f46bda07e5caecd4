"""The processes of a run on several GPUs: how they are started, find each other, and end together."""
