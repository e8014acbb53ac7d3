import socket

import pytest

from lorafleet.service.sockets import socket_folder


@pytest.mark.parametrize("depth", [1, 60, 75, 90, 200])
def test_a_long_socket_name_can_be_bound_under_any_tmpdir(tmp_path, monkeypatch, depth):
    deep = tmp_path / ("x" * depth)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = socket_folder("test-", name_bytes=20)
    path = folder / ("s" * 20)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    finally:
        path.unlink(missing_ok=True)
        folder.rmdir()
