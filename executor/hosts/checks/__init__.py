"""Whether a plan can run on its hosts: asked of each host, answers compared, shown as a table of nodes by checks.

`host` answers on a host, `compare` finds in what hosts differ, `check` asks and joins, `table` draws. The checks of one
machine alone are executor.preflight.preflight's and stand in executor.run.prepare's lists; they are asked here, not
made again.
"""
