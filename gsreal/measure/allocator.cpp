// A CPU allocator for torch that counts the bytes alive and their peak, and otherwise does what torch's own does.
// Sizes are kept beside the blocks: torch demands that a block's data pointer is also its context.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex guard;
long long alive_bytes = 0;
long long peak_bytes = 0;

// never destroyed: torch frees blocks while the process ends
std::unordered_map<void*, size_t>& sizes() {
  static auto* table = new std::unordered_map<void*, size_t>();
  return *table;
}

void free_counted(void* block) {
  if (block == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(guard);
    auto found = sizes().find(block);
    if (found != sizes().end()) {
      alive_bytes -= static_cast<long long>(found->second);
      sizes().erase(found);
    }
  }
  c10::free_cpu(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = c10::alloc_cpu(size);
    if (block != nullptr) {
      std::lock_guard<std::mutex> lock(guard);
      sizes()[block] = size;
      alive_bytes += static_cast<long long>(size);
      if (alive_bytes > peak_bytes) peak_bytes = alive_bytes;
    }
    return {block, block, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

CountingAllocator allocator;

}  // namespace

extern "C" {
void gsreal_install() { c10::SetCPUAllocator(&allocator, /*priority=*/200); }
long long gsreal_alive_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return alive_bytes;
}
long long gsreal_peak_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return peak_bytes;
}
void gsreal_reset_peak() {
  std::lock_guard<std::mutex> lock(guard);
  peak_bytes = alive_bytes;
}
}
