"""Lets JupyterLab be used through the address at which a codespace forwards port 8888.

JupyterLab refuses requests whose Host isn't this machine, and web sockets whose Origin isn't that
Host. GitHub's proxy writes `localhost` into one of the two, or into both. Elsewhere than in a
codespace this changes nothing; the token is asked for everywhere.
"""

import os
import re

if "CODESPACE_NAME" in os.environ:
    name, domain = (os.environ[variable].lower() for variable in
                    ("CODESPACE_NAME", "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN"))
    host = f"{name}-8888.{domain}"
    c = get_config()  # noqa: F821, Jupyter supplies it
    c.ServerApp.local_hostnames = ["localhost", host]
    c.ServerApp.allow_origin_pat = rf"https://{re.escape(host)}|https?://localhost:8888"
