import tempfile

config = {"path": tempfile.mkdtemp()}
