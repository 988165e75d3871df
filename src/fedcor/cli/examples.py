"""The examples that the help shows."""

from __future__ import annotations

EXAMPLES = """examples:
  fedcor demo                                         six selectors compared, in under a minute
  fedcor data fetch fmnist                            download a data set and verify it
  fedcor run fmnist-2spc --selector fedcor --seed 1   one run; add --resume to continue it
  fedcor compare fmnist-2spc --seeds 1-5 --jobs 2     paired runs of the paper's four selectors
  fedcor report runs/fmnist-2spc                      who is best, by how much, how surely
"""
RUN_EXAMPLES = """examples:
  fedcor run digits
  fedcor run fmnist-1spc --selector power_of_choice --seed 3 --rounds 200
  fedcor run fmnist-2spc --set selectors.fedcor.beta=0.75 --out runs/beta-075
  fedcor run my.toml --selector my_module:MySelector --resume
"""
COMPARE_EXAMPLES = """examples:
  fedcor compare digits --seeds 1-3 --jobs 2
  fedcor compare fmnist-dir --selectors random,my_module:MySelector --seeds 1,2,5 --out runs/mine
  fedcor compare fmnist-2spc --seeds 1-5 --jobs 2 --resume      continues after an interruption
  fedcor compare digits --backend dask --address 127.0.0.1:8786
"""
DEMO_EXAMPLES = """examples:
  fedcor demo
  fedcor demo --plot --jobs 1
"""
REPORT_EXAMPLES = """examples:
  fedcor report runs/demo                        the verdict, one table, a small curve
  fedcor report runs/demo --baseline fedcor      compared with fedcor
  fedcor report runs/demo --html                 a page for a browser: runs/demo/report.html
  fedcor report runs/demo --plot                 a picture: against rounds, and against bytes
  fedcor report runs/demo --plot paper/fig1.pdf --latex > paper/table.tex
  fedcor report runs/mine --metric f1            by a metric of your own
  fedcor report runs/demo --full                 every headline number; --json and --csv have all
"""
WATCH_EXAMPLES = """examples:
  fedcor watch runs/demo                         then open the address that it prints
  fedcor watch runs --port 8080
"""
EXPLAIN_EXAMPLES = """examples:
  fedcor explain runs/demo/fedcor/seed-1 --round 40
"""
