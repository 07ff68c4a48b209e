"""Measurements of a node on this machine."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megarl.doctor.node_probe import _PRODUCTS, NodeProbe, _multiply_on, _read


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_a_wrong_element_of_a_product_is_seen(monkeypatch, wrong):
    multiply = torch.Tensor.__matmul__

    def slightly_wrong(left, right):
        product = multiply(left, right)
        if product.dtype == torch.float32:
            product[-1, -1] += wrong
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", slightly_wrong)
    found = _multiply_on(torch.device("cpu"))
    assert found.is_right == (not wrong)
    assert found.tflops > 0
    assert found.free_memory_bytes > 0


def test_a_wrong_element_is_also_seen_in_the_product_of_the_number_format_that_trains(monkeypatch):
    multiply, products = torch.Tensor.__matmul__, []

    def wrong_when_timed(left, right):
        product = multiply(left, right)
        products.append(product)
        # The timed products come first.
        if len(products) <= 1 + _PRODUCTS:
            product[-1, -1] *= 2
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong_when_timed)
    assert not _multiply_on(torch.device("cpu")).is_right


def test_a_device_that_fails_is_said_with_what_torch_says(monkeypatch):
    ecc = "CUDA error: uncorrectable ECC error encountered"

    def broken(_left, _right):
        raise torch.AcceleratorError(ecc + "\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch.Tensor, "__matmul__", broken)
    found = _multiply_on(torch.device("cpu"))
    assert (found.device, found.failure, found.is_right) == ("cpu", ecc, False)


def test_a_way_is_measured_and_one_to_nobody_is_said():
    here, there = NodeProbe("127.0.0.1"), NodeProbe("127.0.0.2")
    address = there.listen()
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(there.receive)
        link = here.send(address, ("a", "b"))
        receiving.result()
    assert (link.sender, link.receiver, link.failure) == ("a", "b", "")
    assert link.gbyte_per_s > 0.01
    assert 0 < link.latency_s < 1
    nobody = here.send(address, ("a", "b"))
    assert nobody.failure.startswith(f"127.0.0.2:{address[1]}: ")


def test_a_ping_that_comes_in_two_pieces_is_whole():
    # Each message of such a socket is received by itself.
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        there.sendall(b"one")
        there.sendall(b"other")
        assert _read(here, 8) == b"oneother"


def test_a_file_is_seen_where_it_is(tmp_path):
    probe = NodeProbe("127.0.0.1")
    assert probe.write(str(tmp_path), "x") == ""
    assert probe.sees(str(tmp_path), "x")
    probe.remove(str(tmp_path), "x")
    assert list(tmp_path.iterdir()) == []
    assert "No such file" in probe.write(str(tmp_path / "absent"), "x")
