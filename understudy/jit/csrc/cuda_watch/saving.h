// Copies of a save go to a stream of their own, one for each device, which waits for no other (paper 001
// §3.2).
//
// The default stream waits for the collective that hangs, so a copy there would never end. Only calls of the
// thread that saves are led there, between `begin` and `end`, and its cudaStreamSynchronize, cudaStreamQuery
// and cudaDeviceSynchronize then ask about that stream alone. The training's kernels are not waited for:
// whoever saves must know that they have come to the end of a step, which `boundary` and `boundary_reached`
// are for.
#pragma once

#include "understudy/jit/csrc/cuda_watch/calls/abi.h"

namespace understudy::cuda::saving {

void begin();
void end();

// Of the current device, in the thread that saves; null elsewhere, and where none could be made: then calls
// go where they would have gone.
Stream stream_here();
// Of a device, which is the current one of this thread behind it. Null: none could be made.
Stream stream_of(int device);

constexpr Error kCannotBeTold = -1;

// In the thread that trains: puts an event into a stream of this device, behind what a step has changed.
// False: it could not be.
bool boundary(int device, Stream stream);
// In the thread that saves, whose device it is behind this: kSuccess if the device has come there, or none
// was ever put; kNotReady; kCannotBeTold if the last could not be put; another error of CUDA.
Error boundary_reached(int device);

}  // namespace understudy::cuda::saving
