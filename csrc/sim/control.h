// Control of the simulated Ascend runtime: what a test, or a program that runs on the simulator, may set and
// read. A C interface in the simulator's own library, beside the runtime's functions, which it leaves as they
// are.
//
// Scope    One machine a process, whoever loaded the library and however often. Nothing here needs aclInit, a
//          device or a context, counts as an API call, or can be made to fail by a fault.
// Returns  0, or 100000 when an argument is wrong, or 507899 in a process forked after aclInit; then nothing
//          has changed, and aclGetRecentErrMsg says what was asked and what the limit is.
// Threads  Any thread, any time. Each call sees, or sets, everything at once.
// Units    Sizes are bytes, counts are counts. A device is counted from 0; -1 means all of them together.
//
// Environment, read when the library is loaded. Empty is as not set; where a value is bad,
// aclrtGetDeviceCount and aclInit fail (100000), and say which:
//     NPU_PROMPT_CACHE_SIM_DEVICES       devices, 1 to 1024 (default 1)
//     NPU_PROMPT_CACHE_SIM_HBM_BYTES     bytes of HBM of each, at least 1 (default 16 GiB)
//     NPU_PROMPT_CACHE_SIM_MAX_EVENTS    live events a device (default 65535)
//     NPU_PROMPT_CACHE_SIM_LATE_STREAMS  seed: as npcSimLateStreams(seed, 8)
//     ASCEND_RT_VISIBLE_DEVICES          of those devices, the ones the program sees, such as 0,1; it counts
//                                        them from 0. npcSimSetConfig sets how many it sees.
//
// Where the simulator is stricter than the runtime, so that what happens to work there fails here:
//   - handles and addresses are never reused, so a stale one is always found out
//   - freed memory is inaccessible to the host
//   - a copy must lie inside what was asked for, not inside its last page
//   - copies whose ends overlap, and copies of 0 bytes, are errors
//   - waiting for an event that is not recorded is an error; so is recording it on another device's stream
//   - destroying a stream with work queued is a violation (aclrtDestroyStreamForce drops the work instead)
//   - aclrtMemcpy and aclrtMemset are ordered with no stream: they overtake what is queued
//   - a queued copy touches its host memory when it runs, however that was allocated: it must live until then
//   - physical memory (aclrtMallocPhysical) forgets what it held when it is mapped again
// What would compute fails: operators, kernels and their like return 207000 and say their name.
// Where it is laxer: aclrtGetDeviceCount and aclrtGetSocName may be called before aclInit, as programs do to
// find out whether there is a device at all.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define NPC_SIM_CONTROL __attribute__((visibility("default")))
#else
#define NPC_SIM_CONTROL
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The machine. Set it before the program starts, or between two uses: HBM cannot shrink below what is in use
// on any device, and a device with a context or live memory cannot be taken away.
struct NpcSimConfig {
  uint64_t hbm_bytes;     // of each device, at least 1; address space, not real memory (default 16 GiB)
  uint32_t device_count;  // at least 1 (default 1)
  uint32_t max_events;    // live events a device (default 65535); one more is error 207007
  uint32_t poison;        // 1: new memory is all 0xFF, a NaN in fp16, bf16 and fp32; 0: it is not (default 1)
};

NPC_SIM_CONTROL int npcSimGetConfig(struct NpcSimConfig* config);
NPC_SIM_CONTROL int npcSimSetConfig(const struct NpcSimConfig* config);

// From here on asynchronous operations (copies, memsets, event records, waits and resets) are queued. Each
// runs at the latest within_calls (at least 1) API calls after the one that submitted it, at a call a
// generator seeded with `seed` chooses, or earlier where a synchronise needs it; in order within a stream, a
// wait after its record. The same calls with the same seed run the same way. What was queued before runs
// first.
NPC_SIM_CONTROL int npcSimLateStreams(uint64_t seed, uint32_t within_calls);

// Runs what is queued; from here on operations run inside the call that submits them (the default).
NPC_SIM_CONTROL int npcSimPromptStreams(void);

// Runs everything queued on a stream, with what that waits for: for whoever runs an operator on the host in
// the place of the device, in stream order. Null is the default stream of the thread's current context. What
// goes wrong is a violation of that stream, as at any other time.
NPC_SIM_CONTROL int npcSimRunStream(void* stream);

// The functions whose calls are counted and can be made to fail. A name lives as long as the process; null
// past the end.
NPC_SIM_CONTROL size_t npcSimFunctionCount(void);
NPC_SIM_CONTROL const char* npcSimFunctionName(size_t index);

// Makes calls number [call, call + times) of `function` return `error` (not 0) and do nothing else. Calls are
// counted from 1, starting now; times 0 means for good. Faults add up: each counts every call, the one set
// first decides the code. `id` (may be null) receives a number to remove the fault by; removing one that is
// used up is no error.
NPC_SIM_CONTROL int npcSimAddFault(const char* function, uint64_t call, uint64_t times, int error,
                                   uint64_t* id);
NPC_SIM_CONTROL int npcSimRemoveFault(uint64_t id);
NPC_SIM_CONTROL int npcSimClearFaults(void);

// Copies done, by the kind they really were: 0 H2H, 1 H2D, 2 D2H, 3 D2D. A queued copy counts when it runs.
struct NpcSimCopies {
  uint64_t copies[4];
  uint64_t bytes[4];
};

// calls[i] receives the calls of npcSimFunctionName(i), failed ones included; `count` must be
// npcSimFunctionCount().
NPC_SIM_CONTROL int npcSimGetCounters(uint64_t* calls, size_t count, struct NpcSimCopies* copies);

// Sets calls and copies to 0, and peaks to what is live now.
NPC_SIM_CONTROL int npcSimResetCounters(void);

struct NpcSimMemory {
  uint64_t live_allocations;  // of device memory
  uint64_t live_bytes;        // HBM they take, rounding and padding included: total minus free
  uint64_t peak_bytes;        // the most live_bytes has been
  uint64_t live_streams;      // created and not destroyed; default streams are not counted
  uint64_t live_events;
  uint64_t live_host_allocations;  // of aclrtMallocHost; belongs to no device: 0 unless device is -1
};

NPC_SIM_CONTROL int npcSimGetMemory(int32_t device, struct NpcSimMemory* memory);

// What the program did wrong where no call could report it at once: one line each, oldest first, joined by
// '\n', ended by '\0'. `needed` receives the size of that text with its end; nothing is written where
// capacity is less.
NPC_SIM_CONTROL int npcSimGetViolations(char* text, size_t capacity, size_t* needed);
NPC_SIM_CONTROL int npcSimClearViolations(void);

#ifdef __cplusplus
}
#endif
