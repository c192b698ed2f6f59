// Builds the production engine's scheduler for the CPU and shows what its bindings keep inside.
// The included files are those of its source distribution, unchanged. What they want of a device or
// of other parts of the engine is answered here; none of it is called by a scheduler.
#include "engine/pybind_scheduler.cpp"
#include "engine/pybind_sequence.cpp"
#include "engine/zos.cpp"

namespace deepinfer::cuda::utils {
uint64_t get_current_stream() { return 0; }
void cuda_copy_async(void *, void *, size_t, uint64_t) { throw std::runtime_error("there is no device"); }
} // namespace deepinfer::cuda::utils

torch::TensorOptions pinned(torch::ScalarType kind) { return torch::TensorOptions().dtype(kind); }

const std::vector<int> &get_engram_lookup_table() {
    static const std::vector<int> empty;
    return empty;
}

void fill_engram_row(int32_t *, int, const std::vector<int> &, const std::vector<int> &, const std::vector<int> &, int, int32_t, int32_t) {
    throw std::runtime_error("there is no n-gram table");
}

namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// The engine holds its group by a std::shared_ptr, torch by a pointer of its own.
std::unique_ptr<Scheduler> make_scheduler(std::shared_ptr<BlockManager> blocks, std::shared_ptr<BlockManager> slots, GroupPtr group,
    const py::object &config, int block_size, int eos_token_id, int lookahead, int most_sum_k, int cp_size) {
    std::shared_ptr<c10d::ProcessGroup> shared(group.get(), [group](c10d::ProcessGroup *) {});
    std::vector<int> no_table;
    return std::make_unique<Scheduler>(block_size, std::move(blocks), std::move(slots), eos_token_id, std::move(shared), config, 0,
        lookahead, most_sum_k, nullptr, no_table, cp_size, 1 << 20, false);
}

py::tuple counters(const Sequence &seq) {
    return py::make_tuple(seq.get_len(), seq.cache.num_tokens, seq.is_finished() ? 0 : seq.schedule.total_inflight_tokens);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    py::module_::import("torch._C._distributed_c10d");
    deepinfer::engine::pybind_engine_sequence(module);
    deepinfer::engine::pybind_engine_scheduler(module);
    module.def("make_scheduler", &make_scheduler);
    module.def("counters", &counters);
    module.def("block_table", [](const Sequence &seq) { return seq.cache.block_table; });
    module.def("reason", [](const Sequence &seq) { return get_finished_reason(seq.schedule.status); });
    module.def("ignored", [](const SchedulerOutputs &step) { return step.ignored_seqs; });
    module.def("rows", [](const SchedulerOutputs &step) { return step.seqlens_q; });
}
