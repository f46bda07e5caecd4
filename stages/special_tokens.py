"""The special tokens that the pipeline needs: what begins a document, and what a conversation is made of."""

SEPARATOR = "<|endoftext|>"  # begins each document
PAD = "<|pad|>"  # fills rows of conversations
END = "<|end|>"  # ends each message
ROLES = ("system", "user", "assistant")


def opener(role: str) -> str:
    """The token that begins a message of a role."""
    return f"<|{role}|>"


NEEDED = (SEPARATOR, PAD, *map(opener, ROLES), END)
