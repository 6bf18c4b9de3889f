"""What several files of these tests use."""

from tests.search.postgres_kit import postgres

__all__ = ["postgres"]
