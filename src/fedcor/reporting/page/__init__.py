"""The report as one self-contained HTML page.

data      what the page shows of all runs
run_data  what it shows of one run
render    the HTML file: template, style, scripts and data
watch     the page served on this machine, following runs that go on
"""
