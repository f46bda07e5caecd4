"""The special tokens of documents and of the chat template."""

SEPARATOR = "<|endoftext|>"  # before every document
PAD = "<|pad|>"  # fills the end of a sequence of conversations
END = "<|end|>"  # after every message
ROLES = ("system", "user", "assistant")


def opener(role: str) -> str:
    """The token before a message of this role."""
    return f"<|{role}|>"


NEEDED = (SEPARATOR, PAD, *map(opener, ROLES), END)
