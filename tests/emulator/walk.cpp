#include "emulate.h"

#include "walk.cu"

static const tpw::WalkParams* const* given;

// params: of each rank. 0: it ended.
extern "C" int emulate(const tpw::WalkParams* const* params, int ranks, int grid, size_t shared_bytes, double limit_s) {
    given = params;
    kernel_of_rank = [](int rank) { walk(*given[rank]); };
    return run_grids(ranks, grid, tpw::kThreads, shared_bytes, limit_s) ? 0 : 1;
}
