"""Records to numbers, and numbers to a verdict, tables, plots, explanations and a page.

From records to numbers:
    series          which runs are compared with each other, and what they are called
    curves          one run as arrays over its rounds; the mean over seeds, with a band
    metrics         the numbers of a run, over seeds with 95 % intervals, and as text
    summary         every run, selector and experiment as plain numbers; the ranking

From numbers to words, tables and pictures:
    notes           seeds, unfinished runs, missing values, faults
    verdict         which selector is best, by how much and how surely: the words
    tables          the table of results; full tables, JSON and CSV
    screen          verdict, table and curve for a terminal, a notebook or a paper
    plots           figures
    results         `Result`: runs, and all of the above as methods; pandas frames

One run:
    explanations    why these clients were chosen in a round: the numbers
    reason_texts    the same in words
    gp_calibration  how well FedCor's Gaussian process predicts

    page            the report as one HTML page, written or served
"""
