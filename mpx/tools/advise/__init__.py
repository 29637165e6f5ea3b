"""Find out by measurement which leaves and contractions need float32."""

from mpx.tools.advise.advice import Advice as Advice
from mpx.tools.advise.advice import AdviceRow as AdviceRow
from mpx.tools.advise.advice import PrecisionErrors as PrecisionErrors
