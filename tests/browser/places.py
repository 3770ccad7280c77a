"""Where the course lies, and where pictures of what was seen go."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "build/screenshots"
