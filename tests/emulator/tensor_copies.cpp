// TMA: copies boxes of tensors to shared memory and back (PTX ISA, 9.7.9.25 and 5.5).
//
// A box arrives at once, or when nothing else can run. A store is made at once, or as late as its
// wait allows. Outside the tensor a load reads nothing and fills in zeros; a store writes nothing
// there except the rest of a vector whose first element is inside.
#include <cstring>

#include "emulated_map.h"
#include "fibers.h"

namespace emulator {
namespace {

constexpr uint32_t kVectorBytes = 16;
constexpr uint32_t kSwizzleRows = 1024;  // alignment of a swizzled box

EmulatedMap map_at(const void* address, Where where) {
  EmulatedMap map;
  std::memcpy(&map, address, sizeof map);
  if (map.magic != EmulatedMap::kMagic) fail("there is no tensor map here", where);
  return map;
}

uint32_t bytes_of(const EmulatedMap& map) {
  uint32_t bytes = EmulatedMap::kElementBytes;
  for (uint32_t d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

// Calls visit(16-byte vector in shared memory, byte offset in it, address in global memory) for
// each element of a box; the address is null outside the tensor.
template <class Visit>
void for_vectors(const EmulatedMap& map, const Box& box, const Visit& visit) {
  constexpr int kElements = kVectorBytes / EmulatedMap::kElementBytes;
  if (map.rank > 3 && map.box[3] != 1) fail("a box of such a depth is not emulated", box.where);
  const int depth = map.rank > 2 ? static_cast<int>(map.box[2]) : 1;
  const int height = map.rank > 1 ? static_cast<int>(map.box[1]) : 1;
  const auto width = static_cast<int>(map.box[0]);
  uint32_t place = box.address;
  for (int z = 0; z < depth; ++z) {
    for (int y = 0; y < height; ++y) {
      const int64_t line[3] = {int64_t{box.at[1]} + y, int64_t{box.at[2]} + z, box.at[3]};
      bool is_there = true;
      int64_t offset = 0;
      for (uint32_t d = 1; d < map.rank; ++d) {
        is_there = is_there && line[d - 1] >= 0 && line[d - 1] < static_cast<int64_t>(map.sizes[d]);
        offset += line[d - 1] * static_cast<int64_t>(map.strides[d - 1]);
      }
      for (int x = 0; x < width; x += kElements, place += kVectorBytes) {
        const uint32_t swizzled = place ^ (place >> 3 & 0x70);
        for (int e = 0; e < kElements; ++e) {
          const int64_t element = int64_t{box.at[0]} + x + e;
          const bool has = is_there && element >= 0 && element < static_cast<int64_t>(map.sizes[0]);
          unsigned char* in_memory =
              has ? map.data + offset + element * EmulatedMap::kElementBytes : nullptr;
          visit(swizzled, e * EmulatedMap::kElementBytes, in_memory);
        }
      }
    }
  }
}

Box box_of(uint32_t address, const void* map, uint32_t barrier, uint32_t blocks, const int (&at)[4],
           int rank, Where where) {
  const EmulatedMap found = map_at(map, where);
  if (static_cast<int>(found.rank) != rank) fail("a tensor map of other dimensions", where);
  // Otherwise an H100 reports "illegal instruction" (measured).
  if (at[0] * EmulatedMap::kElementBytes % static_cast<int>(kVectorBytes) != 0) {
    fail("a box does not begin at a multiple of 16 bytes", where);
  }
  if (address % kSwizzleRows != 0) fail("a swizzled box is not aligned in shared memory", where);
  return {machine.current, where, map, address, barrier, blocks, {at[0], at[1], at[2], at[3]}, 0};
}

bool is_late() {
  return machine.settings.copies == Copies::kLate ||
         (machine.settings.copies == Copies::kRandom && machine.random() % 2 == 0);
}

void make_store(const Box& box) {
  const EmulatedMap map = map_at(box.map, box.where);
  for_vectors(map, box, [&](uint32_t place, int offset, unsigned char* to) {
    const void* from = at_address(place, kVectorBytes, box.where);
    // Measured on an H200: a vector is written whole if its first element is inside the tensor.
    if (to != nullptr && offset == 0) std::memcpy(to, from, kVectorBytes);
  });
}

}  // namespace

void expect_bytes(uint32_t barrier, uint32_t bytes, Where where) {
  machine.bytes_due[static_cast<uint64_t*>(at_address(barrier, sizeof(uint64_t), where))] += bytes;
}

void land_box(const Box& box) {
  const EmulatedMap map = map_at(box.map, box.where);
  for (unsigned rank = 0; rank < machine.launch.cluster; ++rank) {
    if ((box.blocks >> rank & 1) == 0) continue;
    for_vectors(map, box, [&](uint32_t place, int offset, const unsigned char* from) {
      auto* to =
          static_cast<unsigned char*>(in_block_of_cluster(place, rank, kVectorBytes, box.where));
      if (from != nullptr) {
        std::memcpy(to + offset, from, EmulatedMap::kElementBytes);
      } else {
        std::memset(to + offset, 0, EmulatedMap::kElementBytes);
      }
    });
    void* word = in_block_of_cluster(box.barrier, rank, sizeof(uint64_t), box.where);
    if (!arrive_bytes(static_cast<uint64_t*>(word), bytes_of(map))) {
      fail("a box arrives at something that is not an mbarrier", box.where);
    }
  }
}

void load_tensor(uint32_t to, const void* map, uint32_t barrier, uint32_t blocks,
                 const int (&at)[4], int rank, Where where) {
  const Box box = box_of(to, map, barrier, blocks, at, rank, where);
  if (blocks == 0 || blocks >> machine.launch.cluster != 0) {
    fail("the cluster has no such block", where);
  }
  if (is_late()) {
    machine.boxes.push_back(box);
  } else {
    land_box(box);
  }
}

void store_tensor(const void* map, uint32_t from, const int (&at)[4], int rank, Where where) {
  // Otherwise an H200 reports "illegal instruction" (measured). Loads may have such coordinates.
  for (int d = 0; d < rank; ++d) {
    if (at[d] < 0) fail("a box that is stored begins ahead of the tensor", where);
  }
  Box box = box_of(from, map, 0, 0, at, rank, where);
  Fiber& me = *machine.current;
  box.group = me.store_group;
  if (is_late()) {
    me.stores.push_back(box);
  } else {
    make_store(box);
  }
}

void commit_stores() { ++machine.current->store_group; }

void wait_for_stores(int pending_groups) {
  Fiber& me = *machine.current;
  size_t count = 0;
  while (count < me.stores.size() && me.stores[count].group < me.store_group - pending_groups) {
    make_store(me.stores[count++]);
  }
  me.stores.erase(me.stores.begin(), me.stores.begin() + static_cast<ptrdiff_t>(count));
}

void check_stores_at_end(const Fiber& fiber) {
  if (!fiber.stores.empty()) {
    fail("ends, and has not waited for this store of a box", fiber.stores[0].where);
  }
}

}  // namespace emulator
