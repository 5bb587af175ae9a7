#include "emulate.h"

#include "certify.cu"

static const tpw::CertifyParams* const* given;

// params: of each rank. 0: it ended.
extern "C" int emulate(const tpw::CertifyParams* const* params, int ranks, int grid, size_t shared_bytes, double limit_s) {
    given = params;
    kernel_of_rank = [](int rank) { certify(*given[rank]); };
    return run_grids(ranks, grid, tpw::kCertifyThreads, shared_bytes, limit_s) ? 0 : 1;
}
