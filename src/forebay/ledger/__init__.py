"""The fate of every group, its reason, and whether dropping some of them bends the rest."""

from forebay.ledger.accounts import Balance, Ledger
from forebay.ledger.bias import AGED, Comparison, Summary, compare_dropped, length_bias
from forebay.ledger.histories import GroupId, GroupLife

__all__ = [
    "AGED",
    "Balance",
    "Comparison",
    "GroupId",
    "GroupLife",
    "Ledger",
    "Summary",
    "compare_dropped",
    "length_bias",
]
