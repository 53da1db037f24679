"""The committed page is what its sources build; seen without Node, by the hash that the build leaves."""

import hashlib
from pathlib import Path

BOARD = Path(__file__).parents[2] / "src/forebay/board"


def test_the_committed_page_was_built_from_the_committed_sources():
    web = BOARD / "web"
    names = ["answers.json", "index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.js"]
    names += sorted(f"src/{path.name}" for path in (web / "src").iterdir())
    sources = hashlib.sha256()
    for name in names:
        sources.update(f"{name}\n".encode() + (web / name).read_bytes())
    built = (BOARD / "static/sources.sha256").read_text().strip()
    assert built == sources.hexdigest(), "run `npm ci && npm run build` in src/forebay/board/web"


def test_the_page_is_small():
    import gzip

    files = (BOARD / "static").iterdir()
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 400_000
