"""A promise that was not kept: what a checker raises, and what a run ends with."""

from kvcoord.domain import OperationId
from kvcoord.errors import InvariantBroken


class Violation(InvariantBroken):
    """`promise` is one of the ten of DESIGN section 4.6. `operation` names whose story is to be told, empty: all."""

    def __init__(self, promise: str, detail: str, operation: OperationId = "") -> None:
        self.promise, self.operation = promise, operation
        super().__init__(promise, detail)
