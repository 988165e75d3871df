"""The report as one page of HTML: what `report` computed, drawn in a browser.

data, table_data, run_data, why_data
                    what the page shows, as plain values that JSON takes
health_words        how well a process predicts, in a sentence
compact             numbers with as many digits as can be seen
render              one self-contained file: template, style, scripts and data
watch               the same page, served on loopback, following runs that go on

`assets/` holds the template, the style and the scripts as files of their own. The data goes into
the page as JSON, and the scripts set it as text only: nothing of a record becomes markup.
"""

from fedcor.page.data import page_data
from fedcor.page.render import render_page

__all__ = ["page_data", "render_page"]
