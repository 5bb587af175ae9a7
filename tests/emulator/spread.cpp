#include "emulate.h"

#include "spread.cu"

struct SpreadArguments {
    const tpw::WalkParams* walk;
    const tpw::SpreadParams* spread;
};

static const SpreadArguments* const* given;

// arguments: of each rank. All CTAs of all ranks share static arrays here, which hold a block number that is the same for all,
// and a deadline. 0: it ended.
extern "C" int emulate(const SpreadArguments* const* arguments, int ranks, int grid, size_t shared_bytes, double limit_s) {
    given = arguments;
    kernel_of_rank = [](int rank) { spread(*given[rank]->walk, *given[rank]->spread); };
    return run_grids(ranks, grid, tpw::kSpreadWarps * 32, shared_bytes, limit_s) ? 0 : 1;
}
