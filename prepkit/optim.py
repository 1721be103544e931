"""Optimizers that are created after the model is wrapped, named like torch's own."""

from prepkit.config import SGD as SGD
from prepkit.config import Adafactor as Adafactor
from prepkit.config import Adagrad as Adagrad
from prepkit.config import Adam as Adam
from prepkit.config import AdamW as AdamW
from prepkit.config import Group as Group
from prepkit.config import Muon as Muon
from prepkit.config import RMSprop as RMSprop
from prepkit.config import Schedule as Schedule
