"""Settings that every test shares."""

import os

from build import absolute_course_data

# `make test` sees to this, but a bare `pytest` is as good a way to run the tests.
absolute_course_data()
# The tools by name, as in every Make target.
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
