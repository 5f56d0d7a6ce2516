"""Settings of Open MPI: what a site has set stays."""

from __future__ import annotations

from transom_hpc.base import openmpi


def test_what_is_set_stays() -> None:
    environment = {"OMPI_MCA_btl": "self,openib", "OTHER": "1"}
    openmpi.prepare(environment)
    assert environment["OMPI_MCA_btl"] == "self,openib"
    assert environment["OMPI_MCA_pml"] == "ob1"
    assert environment["OTHER"] == "1"
