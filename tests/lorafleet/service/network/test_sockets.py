import socket

import pytest

from lorafleet.service.network.sockets import KEEP_ALIVE, bind_socket, keep_alive, socket_folder


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


@pytest.mark.parametrize("has_server", [True, False])
async def test_connections_of_clients_and_to_services_are_kept_alive(has_server):
    listening = bind_socket("127.0.0.1", 0)
    listening.listen()
    with listening, socket.create_connection(listening.getsockname()) as client:
        accepted, _ = listening.accept()
        with accepted:
            if not has_server:
                keep_alive(client)
            sock = accepted if has_server else client
            assert [sock.getsockopt(level, name) for level, name, _ in KEEP_ALIVE] == [v for _, _, v in KEEP_ALIVE]
