"""The fate of every group, its reason, and whether dropping some of them bends the rest."""

from forebay.ledger.accounts import Balance as Balance
from forebay.ledger.accounts import Ledger as Ledger
from forebay.ledger.bias import Comparison as Comparison
from forebay.ledger.bias import compare_dropped as compare_dropped
from forebay.ledger.histories import GroupId as GroupId
from forebay.ledger.histories import GroupLife as GroupLife
