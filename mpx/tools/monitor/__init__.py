"""The functions of `mpx.monitor`, a file each, and the report of `mpx.underflow_report`."""

from mpx.tools.monitor.underflow import LeafUnderflow as LeafUnderflow
from mpx.tools.monitor.underflow import ScaledShares as ScaledShares
from mpx.tools.monitor.underflow import UnderflowReport as UnderflowReport
