"""From records to numbers, and from numbers to text and figures.

metrics             one run's values
estimates           means over seeds, with intervals
summary             both, for every run of a folder
text, tables        numbers as text: cells; tables, JSON and CSV
explain             why clients were chosen in a round
style, figures, measured_figures
                    drawing, for `fedcor reproduce`; need matplotlib
"""
