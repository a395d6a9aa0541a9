"""Pages in Chromium, without a network."""
import re
import shutil
import subprocess

import pytest
from gluon_amp.parallel.launch import ending_with_parent

CHROMIUM = shutil.which("chromium")
IN_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt install chromium)")


def browse(page, profile, *arguments, size="1000,3000"):
    """Opens a page, and returns what Chromium prints."""
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}",
         f"--window-size={size}", *arguments, page.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
        preexec_fn=ending_with_parent()).stdout


def title_after(page, script, folder, **options):
    """The title that a script gives a page."""
    changed = folder / "page.html"
    changed.write_text(page.read_text(encoding="utf-8").replace("</body>", script),
                       encoding="utf-8")
    shown = browse(changed, folder / "profile", "--dump-dom", "--virtual-time-budget=3000",
                   **options)
    return re.search("<title>(.*?)</title>", shown)[1].replace("&amp;", "&")
