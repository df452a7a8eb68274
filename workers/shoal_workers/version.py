"""The release of Shoal: the only place that names it. The build, the command line and the REST API read it here.

What processes exchange has a number of its own, `contract.base.WIRE_VERSION`, which changes less often.
"""

VERSION = "0.2.0"
