"""These tests run in .venv-parity (`make test-parity`); an environment without their judges does not collect
them.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if all(map(find_spec, ("torch", "transformers", "tiktoken"))) else ["test_*.py"]
