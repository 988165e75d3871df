"""From records to numbers, and from numbers to text and figures.

curve, metrics      one run as arrays, and its values
estimates, pairs    means over seeds, and differences between two selectors, with intervals
groups, comparable, series
                    which runs can be compared, and what they are called
summary             both, for every run of a folder
ranking, verdict    who is best, in a sentence
screen              what a person sees first: verdict, `compact` table, `sparkline`
markup              the same for notebooks and papers
tables              every number: full tables, JSON and CSV
frames              the same as pandas frames
plots               curves of one's own runs; needs matplotlib
explain             why clients were chosen in a round: `explanation` of one, `explanations` of all
health              how well FedCor's process knows the clients: `health` of a run
loss_history, meanings, pick_sentences, explain_text
                    the parts of an explanation, in numbers and in words
attendance, clients, client_map, label_mix
                    who was chosen and who delivered; what is known of each client
repeat              the command that runs it all again
thinning            fewer points for long curves
text, numbers, names, notes, seed_means
                    what the others share
style, figures, measured_figures
                    drawing, for `fedcor reproduce`; need matplotlib
"""
